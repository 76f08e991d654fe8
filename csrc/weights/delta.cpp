#include "weights/delta.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "base/checksum.h"
#include "base/errors.h"

namespace psrl::weights {
namespace {

constexpr uint64_t kPatchMagic = 0x31544C44'4C525350;  // "PSRLDLT1"

// What stands at the front of a patch, byte for byte.
struct HeaderBytes {
  uint64_t magic;
  uint64_t epoch;
  uint64_t base_version;
  uint64_t version;
  ManifestHash manifest_hash;
  VersionHash base_hash;
  VersionHash result_hash;
  uint64_t data_bytes;
  uint32_t num_blocks;
  uint32_t checksum;  // of all before it
};
static_assert(sizeof(HeaderBytes) == PatchHeader::kBytes);

uint32_t checksum_of(const HeaderBytes& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(HeaderBytes, checksum)));
}

std::string text_of(const VersionHash& hash) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : std::as_bytes(std::span(hash))) {
    text += kDigits[static_cast<unsigned>(byte) >> 4];
    text += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return text;
}

// Calls `work(i)` for i below `count`, each once, on `num_threads` threads, this one among them.
// The first exception ends it and is thrown on. `make_worker` gives each thread its own `work`.
template <class MakeWorker>
void in_parallel(uint32_t count, unsigned num_threads, MakeWorker make_worker) {
  std::atomic<uint32_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    try {
      auto work = make_worker();
      for (uint32_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      const std::scoped_lock lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 1; i < std::min<unsigned>(num_threads, count); ++i) threads.emplace_back(run);
  run();
  threads.clear();
  if (failure) std::rethrow_exception(failure);
}

ConstBytes chunk_of(ConstBytes data, uint64_t index) {
  const uint64_t start = index * kChunkBytes;
  return data.subspan(start, std::min(kChunkBytes, data.size() - start));
}

void require_fits(const DeltaLayout& layout, const VersionView& version) {
  if (version.data.size() != layout.data_bytes() ||
      version.checksums.size() != layout.num_blocks()) {
    throw StorageError("delta: a version has " + std::to_string(layout.data_bytes()) +
                       " bytes in " + std::to_string(layout.num_blocks()) + " chunks, not " +
                       std::to_string(version.data.size()) + " and " +
                       std::to_string(version.checksums.size()) + " checksums");
  }
}

}  // namespace

VersionHash version_hash(const ManifestHash& manifest_hash, std::span<const uint32_t> checksums) {
  // FNV-1a of 128 bits: it tells versions apart, no more is asked of it.
  using Wide = unsigned __int128;
  constexpr Wide kPrime = (Wide{1} << 88) + 0x13B;
  Wide hash = (Wide{0x6C62272E07BB0142} << 64) + 0x62B821756295C58D;
  const auto add = [&](ConstBytes bytes) {
    for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * kPrime;
  };
  add(std::as_bytes(std::span(manifest_hash)));
  add(std::as_bytes(checksums));
  return {static_cast<uint64_t>(hash), static_cast<uint64_t>(hash >> 64)};
}

std::vector<uint32_t> chunk_checksums(ConstBytes data, unsigned num_threads) {
  std::vector<uint32_t> checksums(chunks_of(data.size()));
  in_parallel(static_cast<uint32_t>(checksums.size()), num_threads, [&] {
    return [&](uint32_t i) { checksums[i] = chunk_checksum(chunk_of(data, i), i); };
  });
  return checksums;
}

uint64_t read_through(ConstBytes data) {
  uint64_t all = 0;
  for (size_t i = 0; i + sizeof(uint64_t) <= data.size(); i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, data.data() + i, sizeof(word));
    all ^= word;
  }
  return all;
}

PatchHeader PatchHeader::take(ConstBytes& in) {
  HeaderBytes header;
  if (in.size() < sizeof(header)) throw StorageError("delta: the patch's header is cut off");
  std::memcpy(&header, in.data(), sizeof(header));
  if (header.magic != kPatchMagic) throw StorageError("delta: this is not a patch");
  if (header.checksum != checksum_of(header)) {
    throw ChecksumMismatch("delta: the patch's header is damaged");
  }
  in = in.subspan(sizeof(header));
  return {header.epoch,     header.base_version, header.version,    header.manifest_hash,
          header.base_hash, header.result_hash,  header.data_bytes, header.num_blocks};
}

void PatchHeader::append_to(std::vector<std::byte>& out) const {
  HeaderBytes header{kPatchMagic, epoch,       base_version, version,    manifest_hash,
                     base_hash,   result_hash, data_bytes,   num_blocks, 0};
  header.checksum = checksum_of(header);
  const auto bytes = std::as_bytes(std::span(&header, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

void PatchHeader::require_base(const ManifestHash& manifest, const VersionHash& hash) const {
  const std::string name = "delta: the patch from version " + std::to_string(base_version) +
                           " to " + std::to_string(version);
  if (manifest != manifest_hash) {
    throw StorageError(name + " is for manifest " + text_of(manifest_hash) + ", not " +
                       text_of(manifest));
  }
  if (hash != base_hash) {
    throw StorageError(name + " starts from " + text_of(base_hash) + ", not from " + text_of(hash));
  }
}

std::vector<std::byte> encode_patch(const DeltaLayout& layout, const PatchName& name,
                                    const VersionView& base, const VersionView& next,
                                    unsigned num_threads) {
  require_fits(layout, base);
  require_fits(layout, next);
  std::vector<std::vector<std::byte>> blocks(layout.num_blocks());
  in_parallel(layout.num_blocks(), num_threads, [&] {
    return [&, encoder = BlockEncoder(layout)](uint32_t i) mutable {
      encoder.encode(i, chunk_of(base.data, i), chunk_of(next.data, i), base.checksums[i],
                     next.checksums[i], blocks[i]);
    };
  });
  const PatchHeader header{.epoch = name.epoch,
                           .base_version = name.base_version,
                           .version = name.version,
                           .manifest_hash = name.manifest_hash,
                           .base_hash = version_hash(name.manifest_hash, base.checksums),
                           .result_hash = version_hash(name.manifest_hash, next.checksums),
                           .data_bytes = layout.data_bytes(),
                           .num_blocks = layout.num_blocks()};
  size_t total = PatchHeader::kBytes;
  for (const auto& block : blocks) total += block.size();
  std::vector<std::byte> patch;
  patch.reserve(total);
  header.append_to(patch);
  for (const auto& block : blocks) patch.insert(patch.end(), block.begin(), block.end());
  return patch;
}

std::vector<uint32_t> apply_patch(const DeltaLayout& layout, ConstBytes patch,
                                  const ManifestHash& manifest_hash, const VersionView& base,
                                  Bytes out, unsigned num_threads) {
  require_fits(layout, base);
  const PatchHeader header = PatchHeader::take(patch);
  header.require_base(manifest_hash, version_hash(manifest_hash, base.checksums));
  if (header.data_bytes != layout.data_bytes() || header.num_blocks != layout.num_blocks() ||
      out.size() != layout.data_bytes()) {
    throw StorageError("delta: the patch makes " + std::to_string(header.data_bytes) +
                       " bytes, the manifest says " + std::to_string(layout.data_bytes()) +
                       ", the target has " + std::to_string(out.size()));
  }
  std::vector<Block> blocks;
  for (uint32_t i = 0; i < layout.num_blocks(); ++i) {
    blocks.push_back(Block::take(patch));
    if (blocks.back().header.index != i) {
      throw StorageError("delta: a malformed patch: block " + std::to_string(i) + " is missing");
    }
  }
  if (!patch.empty()) throw StorageError("delta: a malformed patch: bytes follow the last block");
  std::vector<uint32_t> checksums(layout.num_blocks());
  in_parallel(layout.num_blocks(), num_threads, [&] {
    return [&](uint32_t i) {
      const ConstBytes from = chunk_of(base.data, i);
      checksums[i] = apply_block(layout, blocks[i], from, base.checksums[i],
                                 out.subspan(i * kChunkBytes, from.size()));
    };
  });
  if (version_hash(manifest_hash, checksums) != header.result_hash) {
    throw ChecksumMismatch("delta: the patch did not make version " +
                           std::to_string(header.version));
  }
  return checksums;
}

}  // namespace psrl::weights
