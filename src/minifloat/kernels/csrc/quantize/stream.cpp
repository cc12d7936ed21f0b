#include "stream.h"

#include "../threads.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

namespace minifloat {
namespace {

// Source bytes that are read at a time: with their codes they fit an L2 cache of 1 MiB.
constexpr int64_t kSlab = 512 << 10;
// Codes that are written at a time. The operating system allocates its cache in pieces of this size; pieces of 2 MiB
// can be memory that a virtual machine has never touched (measured: six times slower).
constexpr int64_t kWrite = 1 << 20;
// Bytes written before the operating system is asked to start moving them to the disk.
constexpr int64_t kWriteBack = 16 << 20;
// Distance between a range that is read and the range that the operating system fetches meanwhile.
constexpr int64_t kReadAhead = 32 << 20;

constexpr int64_t kItemBytes[] = {2, 2, 4};  // by minifloat_dtype

class Stream {
  public:
    Stream(minifloat_stream_args& args, const SlabFunctions& functions) : a_(args), f_(functions) {}

    int32_t run() {
        const int64_t row_bytes = a_.cast.cols * kItemBytes[a_.cast.dtype];
        return a_.kind == MINIFLOAT_STREAM_CAST ? cast(row_bytes) : copy();
    }

  private:
    int32_t cast(int64_t row_bytes) {
        minifloat_quantize_rows_args& total = a_.cast;
        const int64_t code_row = total.cols * total.element.bits / 8;
        const int64_t step = total.one_scale ? 1 : total.block_rows;
        const int64_t rows = max64(kSlab / row_bytes / step, 1) * step;
        const int64_t source_bytes = (min64(rows, total.rows) * row_bytes + 63) / 64 * 64;
        const int64_t room = max64(kWrite, min64(rows, total.rows) * code_row);
        uint8_t* const memory = static_cast<uint8_t*>(scratch(kScratchCall, source_bytes + room));
        if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
        uint8_t* const codes = memory + source_bytes;
        total.signal = total.noise = 0.0;
        total.saturated = total.flushed = total.nonfinite = 0;
        const int64_t scale_bytes = total.scaling == MINIFLOAT_SCALE_FLOAT32 ? sizeof(float) : 1;
        const int64_t grid_cols = (total.cols + total.block_cols - 1) / total.block_cols;
        int64_t waiting = 0;  // bytes of codes that are not written
        for (int64_t row = 0; row < total.rows; row += rows) {
            minifloat_quantize_rows_args slab = total;
            slab.rows = min64(rows, total.rows - row);
            if (!read(memory, slab.rows * row_bytes)) return MINIFLOAT_OK;
            slab.data = memory;
            if (waiting + slab.rows * code_row > room && !flush(codes, waiting)) return MINIFLOAT_OK;
            slab.codes = codes + waiting;
            if (!total.one_scale)
                slab.scales = static_cast<uint8_t*>(total.scales) + row / step * grid_cols * scale_bytes;
            f_.quantize_rows(slab);
            waiting += slab.rows * code_row;
            total.signal += slab.signal;
            total.noise += slab.noise;
            total.saturated += slab.saturated;
            total.flushed += slab.flushed;
            total.nonfinite += slab.nonfinite;
            if (slab.nonfinite > 0) {
                a_.first_row = row;
                a_.last_row = row + slab.rows - 1;
                return MINIFLOAT_OK;
            }
        }
        flush(codes, waiting);
        return MINIFLOAT_OK;
    }

    int32_t copy() {
        uint8_t* const memory = static_cast<uint8_t*>(scratch(kScratchCall, kWrite));
        if (memory == nullptr) return MINIFLOAT_NO_MEMORY;
        a_.cast.nonfinite = 0;
        for (int64_t begin = 0; begin < a_.bytes; begin += kWrite) {
            int64_t bytes = min64(kWrite, a_.bytes - begin);
            if (!read(memory, bytes)) return MINIFLOAT_OK;
            if (a_.kind == MINIFLOAT_STREAM_COPY_FINITE) {
                minifloat_amax_args slab = {memory, bytes / kItemBytes[a_.cast.dtype], a_.cast.dtype, 0.0f, 0};
                f_.amax(slab);
                a_.cast.nonfinite += slab.nonfinite;
                if (slab.nonfinite > 0) return MINIFLOAT_OK;
            }
            if (!flush(memory, bytes)) return MINIFLOAT_OK;
        }
        return MINIFLOAT_OK;
    }

    // The next bytes of the source.
    bool read(uint8_t* memory, int64_t bytes) {
#if defined(POSIX_FADV_WILLNEED)
        posix_fadvise(a_.source, a_.source_offset + kReadAhead, bytes, POSIX_FADV_WILLNEED);  // a hint: may fail
#endif
        for (int64_t done = 0; done < bytes;) {
            const ssize_t count =
                pread(a_.source, memory + done, static_cast<size_t>(bytes - done), a_.source_offset + done);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) {
                a_.position = a_.source_offset + done;
                a_.missing = bytes - done;
                return fail(count < 0 ? MINIFLOAT_STREAM_CANNOT_READ : MINIFLOAT_STREAM_ENDED);
            }
            done += count;
        }
        a_.source_offset += bytes;
        f_.blake3_update(*a_.source_hash, memory, bytes);
        return true;
    }

    // Writes the next bytes of the target and sets their number to zero.
    bool flush(const uint8_t* memory, int64_t& bytes) {
        for (int64_t done = 0; done < bytes;) {
            const ssize_t count =
                pwrite(a_.target, memory + done, static_cast<size_t>(bytes - done), a_.target_offset + done);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return fail(MINIFLOAT_STREAM_CANNOT_WRITE);
            done += count;
        }
        if (a_.target_hash != nullptr) f_.blake3_update(*a_.target_hash, memory, bytes);
        a_.target_offset += bytes;
        unsent_ += bytes;
        bytes = 0;
        if (unsent_ >= kWriteBack) {
#if defined(__linux__)
            sync_file_range(a_.target, a_.target_offset - unsent_, unsent_, SYNC_FILE_RANGE_WRITE);  // a hint
#endif
            unsent_ = 0;
        }
        return true;
    }

    bool fail(int32_t status) {
        a_.failed = status;
        a_.error = errno;
        return false;
    }

    static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
    static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

    minifloat_stream_args& a_;
    const SlabFunctions& f_;
    int64_t unsent_ = 0;
};

}  // namespace

int32_t stream(minifloat_stream_args& args, const SlabFunctions& functions) {
    args.failed = args.error = 0;
    return Stream(args, functions).run();
}

}  // namespace minifloat
