// The errors of the core. The bindings map each class to the class of the same name in psrl.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace psrl {

// Shared memory could not be had, mapped or read.
class StorageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No room for a row; the text says how much is missing and which key to raise.
class ArenaFull : public StorageError {
 public:
  using StorageError::StorageError;
};

// A segment, key, field or generation that is not there.
class UnknownKey : public StorageError {
 public:
  using StorageError::StorageError;
};

// The lease was taken back; start again on the newest version.
class Revoked : public StorageError {
 public:
  using StorageError::StorageError;
};

// The bytes read are not those that were committed.
class ChecksumMismatch : public StorageError {
 public:
  using StorageError::StorageError;
};

// A link to another node cannot do what was asked; says which peer, address or range.
class LinkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What an errno means and, where a limit was met, which one to raise.
std::string error_text(int code);

// What to raise if this process may lock only so much memory; empty if that is not limited.
std::string memlock_advice();

// StorageError with the text of errno: "WHAT: No space left on device".
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace psrl
