// An exact patch between two versions of the weights.
//
//   PatchHeader | the blocks (delta_block.h) of all chunks, in order
//
// The header names both versions by a hash over the manifest and the checksums of all chunks, which
// the slots carry anyway. It is a hash of the content, whatever way a version came, so patches form
// a chain: the result of one is the base of the next, and a full copy may stand anywhere in it.
//
// Applying writes a free slot from the slot of the base. It can be killed anywhere and said again:
// nothing is visible before the commit, and the base is only read. Reading is total: the result is
// the version that was named, or an error of base/errors.h is raised. (Checksums find accidents;
// that a patch is from a friend is the link's business.)
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "weights/delta_block.h"
#include "weights/store.h"

namespace psrl::weights {

using VersionHash = std::array<uint64_t, 2>;

// `checksums` has one of each chunk, as the store keeps them.
VersionHash version_hash(const ManifestHash& manifest_hash, std::span<const uint32_t> checksums);

// The checksums of all chunks of a version.
std::vector<uint32_t> chunk_checksums(ConstBytes data, unsigned num_threads);

// Reads all bytes once and returns their xor: what the speed of a comparison is set against.
uint64_t read_through(ConstBytes data);

struct PatchHeader {
  static constexpr size_t kBytes = 96;
  // Takes it off the front of `in`. StorageError if it is malformed.
  static PatchHeader take(ConstBytes& in);
  void append_to(std::vector<std::byte>& out) const;

  // StorageError, which names both, unless this patch starts from that version.
  void require_base(const ManifestHash& manifest_hash, const VersionHash& hash) const;

  uint64_t epoch = 0;
  uint64_t base_version = 0;
  uint64_t version = 0;
  ManifestHash manifest_hash{};
  VersionHash base_hash{};
  VersionHash result_hash{};
  uint64_t data_bytes = 0;
  uint32_t num_blocks = 0;
};

// One version as a patch sees it.
struct VersionView {
  ConstBytes data;
  std::span<const uint32_t> checksums;  // of its chunks
};

// What the header says beyond hashes and sizes.
struct PatchName {
  uint64_t epoch = 0;
  uint64_t base_version = 0;
  uint64_t version = 0;
  ManifestHash manifest_hash{};
};

std::vector<std::byte> encode_patch(const DeltaLayout& layout, const PatchName& name,
                                    const VersionView& base, const VersionView& next,
                                    unsigned num_threads);

// Makes the next version in `out`, which must not overlap the base, and returns the checksums of
// its chunks. StorageError for a malformed patch or another base, ChecksumMismatch for a damaged
// one; `out` is then garbage.
std::vector<uint32_t> apply_patch(const DeltaLayout& layout, ConstBytes patch,
                                  const ManifestHash& manifest_hash, const VersionView& base,
                                  Bytes out, unsigned num_threads);

}  // namespace psrl::weights
