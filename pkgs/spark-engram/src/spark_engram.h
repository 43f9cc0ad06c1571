/* C interface of the spark-engram core: packing pages, and reading rows from a packed file.
 *
 * The format is specified in FORMAT.md. Headers are parsed in Python (spark_engram.format);
 * the numbers given to se_store_open have been checked there, and what memory safety depends
 * on is checked again here.
 */
#ifndef SPARK_ENGRAM_H
#define SPARK_ENGRAM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SE_EXPORT __attribute__((visibility("default")))

#define SE_ABI_VERSION 1
#define SE_PAGE_BYTES 4096
#define SE_ROWS_PER_PAGE 15
#define SE_WEIGHT_BYTES 256
#define SE_SCALE_BYTES 8
#define SE_ROW_BYTES (SE_WEIGHT_BYTES + SE_SCALE_BYTES)
#define SE_HISTOGRAM_BUCKETS 24

enum {
  SE_OK = 0,
  SE_INVALID = -1,  /* an argument is out of range */
  SE_SYSTEM = -2,   /* a system call failed */
  SE_SHORT = -3,    /* the file ended inside a page */
  SE_CORRUPT = -4,  /* a page failed its checksum, number or file id */
};

enum { SE_BACKEND_AUTO = 0, SE_BACKEND_IO_URING = 1, SE_BACKEND_PREAD = 2 };

typedef struct {
  int32_t fd;              /* packed file; duplicated, so the caller may close it */
  uint32_t backend;        /* SE_BACKEND_* */
  uint32_t depth;          /* reads in flight, 1..4096 */
  uint32_t threads;        /* pread backend only, 1..1024 (the caller is one of them) */
  uint32_t max_run_pages;  /* longest coalesced read, 1..64 pages */
  uint32_t sqpoll;         /* 1: kernel thread polls the submission queue */
  uint32_t cache_ways;     /* 1..16 */
  uint32_t file_id;
  uint64_t row_start;      /* global rows [row_start, row_end) are in the file */
  uint64_t row_end;
  uint64_t max_ids;        /* 1..2^28, ids planned at once; larger batches are read in pieces */
  uint64_t cache_bytes;    /* 0: no row cache */
} se_options;

/* Counters since opening. Histogram bucket i counts durations below 2^i microseconds that are
 * in no lower bucket; the last one counts all longer ones. */
typedef struct {
  uint64_t batches;
  uint64_t lookups;      /* ids asked for */
  uint64_t owned;        /* of these, ids whose row is in this file */
  uint64_t cache_hits;
  uint64_t pages;        /* distinct pages read */
  uint64_t reads;        /* read requests (a coalesced run is one) */
  uint64_t read_bytes;
  uint64_t errors;
  uint64_t batch_us_sum;
  uint64_t read_us_sum;
  uint64_t batch_us[SE_HISTOGRAM_BUCKETS];
  uint64_t read_us[SE_HISTOGRAM_BUCKETS];
} se_stats;

typedef struct se_store se_store;
typedef struct se_queue se_queue;
typedef struct se_job se_job;

SE_EXPORT uint32_t se_abi_version(void);

/* "io_uring,pread" or "pread": the backends this build has. */
SE_EXPORT const char *se_backends(void);

/* CRC-32C of data, continued from seed (0 to begin). */
SE_EXPORT uint32_t se_crc32c(const void *data, size_t bytes, uint32_t seed);

/* Builds ceil(rows / 15) pages at out (SE_PAGE_BYTES each) from weights [rows, 256] and scales
 * [rows, 8]. Returns the CRC-32C, continued from seed, of the page checksums in order. */
SE_EXPORT uint32_t se_pack_pages(const uint8_t *weights, const uint8_t *scales, uint64_t rows,
                                 uint64_t first_page, uint32_t file_id, uint32_t seed,
                                 uint8_t *out);

/* Checks pages [first_page, first_page + pages). *crc: as se_pack_pages. On SE_CORRUPT
 * *bad_page is the first bad page's number. */
SE_EXPORT int se_check_pages(const uint8_t *data, uint64_t pages, uint64_t first_page,
                             uint32_t file_id, uint32_t *crc, uint64_t *bad_page);

/* On failure writes a message of at most message_bytes to message. */
SE_EXPORT int se_store_open(const se_options *options, se_store **store, char *message,
                            size_t message_bytes);
/* No gather or job of this store may run during or after this call. */
SE_EXPORT void se_store_close(se_store *store);

/* "io_uring" or "pread", and why it was not the other one ("" if there is nothing to say). */
SE_EXPORT const char *se_store_backend(const se_store *store);
SE_EXPORT const char *se_store_note(const se_store *store);

/* Reads the rows of ids [n] into weights [n, 256] and scales [n, 8]. Positions whose id is not
 * in this file are left as they are. Safe from many threads: calls take turns. Allocates
 * nothing. After a failure the contents of weights and scales are unspecified. */
SE_EXPORT int se_store_gather(se_store *store, const int64_t *ids, uint64_t n, uint8_t *weights,
                              uint8_t *scales, char *message, size_t message_bytes);

SE_EXPORT void se_store_stats(const se_store *store, se_stats *out);

/* A thread that does started jobs one after the other. One queue for the stores of one drive
 * gives the lookup that is needed first the whole drive. NULL: no thread could be started. */
SE_EXPORT se_queue *se_queue_new(void);
/* No job of this queue may be started or waited for. */
SE_EXPORT void se_queue_free(se_queue *queue);

/* A gather with fixed arguments; queue may be NULL for a job that is only run, never started.
 * All pointers must stay valid until se_job_free. With
 * abort_on_error a failed read ends the process (SIGABRT) after one line on stderr: inside a
 * CUDA graph there is no caller to report to, and wrong rows must not be used. */
SE_EXPORT se_job *se_job_new(se_store *store, se_queue *queue, const int64_t *ids, uint64_t n,
                             uint8_t *weights, uint8_t *scales, int abort_on_error);
/* The job must not be running, started or waited for. */
SE_EXPORT void se_job_free(se_job *job);

/* Callbacks for cudaLaunchHostFunc / cuLaunchHostFunc; job is a se_job *. They make no CUDA
 * call, allocate nothing, enter no interpreter.
 *
 * se_job_run reads before it returns. se_job_start hands the job to its queue and returns at
 * once; se_job_wait returns when every start of the job has been read. CUDA runs
 * host functions of all streams on one thread, and NCCL needs it for each collective of a
 * graph, so a read that is to overlap with computation must not sit on that thread. */
SE_EXPORT void se_job_run(void *job);
SE_EXPORT void se_job_start(void *job);
SE_EXPORT void se_job_wait(void *job);

/* The worst status of this job's runs (SE_OK if all went well). */
SE_EXPORT int se_job_status(const se_job *job);

#ifdef __cplusplus
}
#endif

#endif
