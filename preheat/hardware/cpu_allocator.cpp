// CPU allocator for torch tensors: one growing heap with best fit and coalescing, which is not released during a run.
// `preheat/planning/memory/cpu_heap.py` models the same algorithm on the log of a dry run; change both together.
// Built and installed by cpu_allocator.py.

#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kSmall = 64 << 10;    // smaller blocks come from malloc
constexpr size_t kAlignment = 64;      // same as torch's; sizes are rounded up to it
constexpr size_t kHuge = 2 << 20;      // the heap grows by huge pages
// Start of the heap, far from the system's mappings, so that it can grow in place.
constexpr uintptr_t kFirst = uintptr_t{1} << 44;

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

class Heap {
 public:
  void* allocate(size_t size) {
    size = rounded(size, kAlignment);
    std::lock_guard<std::mutex> guard(mutex);
    uintptr_t start;
    auto hole = by_size_.lower_bound({size, 0});
    if (hole != by_size_.end()) {
      start = hole->second;
      size_t room = remove(start);
      if (room > size) enter(start + size, room - size);
    } else {
      if (top_ + size > mapped_ && !grow(size)) return nullptr;
      start = top_;
      top_ += size;
      if (top_ - first_ > furthest_) furthest_ = top_ - first_;
    }
    blocks_[start] = size;
    return reinterpret_cast<void*>(start);
  }

  // Returns false if the pointer is not a block of this heap.
  bool free(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex);
    auto block = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == blocks_.end()) return false;
    uintptr_t start = block->first;
    size_t size = block->second;
    blocks_.erase(block);
    auto behind = holes_.find(start + size);
    if (behind != holes_.end()) size += remove(start + size);
    auto before = holes_.lower_bound(start);
    if (before != holes_.begin() && (--before)->first + before->second == start) {
      start = before->first;
      size += remove(start);
    }
    if (start + size == top_) {
      top_ = start;
    } else {
      enter(start, size);
    }
    return true;
  }

  void trim() {
    std::lock_guard<std::mutex> guard(mutex);
    uintptr_t end = rounded(top_, kHuge);
    if (end < mapped_) {
      munmap(reinterpret_cast<void*>(end), mapped_ - end);
      mapped_ = end;
    }
    forget(top_, mapped_);
    for (auto [start, size] : holes_) forget(start, start + size);
  }

  size_t furthest() {
    std::lock_guard<std::mutex> guard(mutex);
    return furthest_;
  }

  std::mutex mutex;

 private:
  void enter(uintptr_t start, size_t size) {
    holes_[start] = size;
    by_size_.insert({size, start});
  }

  size_t remove(uintptr_t start) {
    auto hole = holes_.find(start);
    size_t size = hole->second;
    by_size_.erase({size, start});
    holes_.erase(hole);
    return size;
  }

  // Extends the mapping so that `size` fits at the end; if the addresses are taken, continues at a new address.
  bool grow(size_t size) {
    size_t more = rounded(top_ + size - mapped_, kHuge);
    uintptr_t at = map(mapped_, more);
    if (at == mapped_) {
      mapped_ += more;
      return true;
    }
    if (at) munmap(reinterpret_cast<void*>(at), more);  // kernels before 4.17 treat the address as a hint
    more = rounded(size, kHuge) + kHuge;
    at = map(0, more);
    if (!at) return false;
    if (top_ < mapped_) enter(top_, mapped_ - top_);
    first_ = rounded(at, kHuge) - (top_ - first_);  // keeps the spanned size
    top_ = rounded(at, kHuge);
    mapped_ = at + more;
    return true;
  }

  uintptr_t map(uintptr_t at, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED_NOREPLACE : 0);
    void* found = mmap(reinterpret_cast<void*>(at), size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found == MAP_FAILED) return 0;
    madvise(found, size, MADV_HUGEPAGE);  // fewer page faults and TLB misses
    return reinterpret_cast<uintptr_t>(found);
  }

  static void forget(uintptr_t start, uintptr_t end) {
    constexpr size_t page = 4096;
    start = rounded(start, page);
    end = end / page * page;
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
  }

  std::map<uintptr_t, size_t> holes_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;
  std::unordered_map<uintptr_t, size_t> blocks_;
  // Start of the heap, end of the used blocks, end of the mapping.
  uintptr_t first_ = kFirst, top_ = kFirst, mapped_ = kFirst;
  size_t furthest_ = 0;
};

Heap& heap() {
  static Heap* only = new Heap;  // never destroyed, because tensors may outlive static destructors
  return *only;
}

void release(void* pointer) {
  if (!pointer) return;
  c10::profiledCPUMemoryReporter().Delete(pointer);
  if (!heap().free(pointer)) std::free(pointer);
}

struct HeapAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = nullptr;
    if (size) {
      if (size < kSmall) {
        if (posix_memalign(&pointer, kAlignment, size)) pointer = nullptr;
      } else {
        pointer = heap().allocate(size);
      }
      if (!pointer) {
        c10::profiledCPUMemoryReporter().OutOfMemory(size);
        TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", size, " bytes.");
      }
      c10::profiledCPUMemoryReporter().New(pointer, size);
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

}  // namespace

extern "C" {

void preheat_install() {
  static HeapAllocator* allocator = nullptr;
  if (allocator) return;
  allocator = new HeapAllocator;
  // A process forked while another thread allocates must not inherit a locked heap.
  pthread_atfork([] { heap().mutex.lock(); }, [] { heap().mutex.unlock(); }, [] { heap().mutex.unlock(); });
  c10::SetCPUAllocator(allocator, 1);
}

void preheat_trim() { heap().trim(); }

// Peak of the bytes that the heap spans, holes included.
size_t preheat_furthest() { return heap().furthest(); }
}
