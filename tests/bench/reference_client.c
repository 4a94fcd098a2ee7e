/* The reference of the load client's benchmark: what a closed loop of streaming completions costs in C with epoll.
 *
 *   reference_client PORT CONCURRENCY REQUESTS MAX_TOKENS OUT.jsonl
 *
 * The same work as the measured client: stamp every read, keep the bytes, find the events after the stream has ended,
 * take the token ids and their times, write one JSON line a request, fsync. Times are CLOCK_MONOTONIC, ns. It knows
 * the stamped server's answers only: one token an event, chunked framing, [DONE].
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct mark { /* one read: where its bytes end and when it was */
	size_t end;
	int64_t ns;
};

struct connection {
	int fd;
	int request; /* -1: idle */
	int64_t scheduled_ns, sent_ns, first_byte_ns;
	char *bytes;
	size_t used, room;
	struct mark *marks;
	size_t marks_used, marks_room;
};

static int epoll_fd, requests, max_tokens, next_request, finished;
static FILE *out;
static struct sockaddr_in address;

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void *grown(void *block, size_t bytes)
{
	block = realloc(block, bytes);
	if (block == NULL)
		die("realloc");
	return block;
}

static void open_connection(struct connection *c)
{
	int one = 1;
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};

	c->fd = socket(AF_INET, SOCK_STREAM, 0);
	if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address) != 0)
		die("connect");
	setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event) != 0)
		die("epoll_ctl");
	c->request = -1;
}

static void send_next(struct connection *c, int64_t scheduled_ns)
{
	char body[512], whole[1024];
	int length, total;

	if (next_request >= requests)
		return;
	c->request = next_request++;
	c->scheduled_ns = scheduled_ns;
	c->first_byte_ns = 0;
	c->used = c->marks_used = 0;
	length = snprintf(body, sizeof body,
		"{\"model\":\"m\",\"prompt\":[7,%d,%d,%d],\"max_tokens\":%d,\"stream\":true,"
		"\"stream_options\":{\"include_usage\":true},\"return_token_ids\":true}",
		c->request, c->request + 1, c->request + 2, max_tokens);
	total = snprintf(whole, sizeof whole,
		"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
		"X-Request-Id: c-%d\r\nContent-Length: %d\r\n\r\n%s", c->request, length, body);
	c->sent_ns = now_ns();
	if (send(c->fd, whole, total, 0) != total)
		die("send");
}

/* When the byte at `offset` had been read. */
static int64_t read_at(const struct connection *c, size_t offset, size_t *mark)
{
	while (*mark + 1 < c->marks_used && c->marks[*mark].end <= offset)
		(*mark)++;
	return c->marks[*mark].ns;
}

static void write_record(struct connection *c)
{
	static int64_t *times;
	static int *ids;
	const char *at = c->bytes, *end = c->bytes + c->used, *event;
	size_t mark = 0;
	int count = 0, done = 0, i;

	if (times == NULL) {
		times = grown(NULL, sizeof *times * (max_tokens + 1));
		ids = grown(NULL, sizeof *ids * (max_tokens + 1));
	}
	while ((event = memmem(at, end - at, "data: ", 6)) != NULL) {
		const char *stop = memmem(event, end - event, "\n\n", 2);
		const char *token;
		if (stop == NULL)
			break;
		if (memcmp(event + 6, "[DONE]", 6) == 0) {
			done = 1;
		} else if ((token = memmem(event, stop - event, "\"token_ids\":[", 13)) != NULL && count < max_tokens) {
			ids[count] = atoi(token + 13);
			times[count++] = read_at(c, stop + 1 - c->bytes, &mark);
		}
		at = stop + 2;
	}
	fprintf(out, "{\"key\":\"%d\",\"scheduled_ns\":%lld,\"sent_ns\":%lld,\"first_byte_ns\":%lld,\"first_token_ns\":%lld,"
		"\"last_token_ns\":%lld,\"output_tokens\":%d,\"done\":%s,\"token_gaps_us\":[", c->request,
		(long long)c->scheduled_ns, (long long)c->sent_ns, (long long)c->first_byte_ns,
		(long long)(count ? times[0] : 0), (long long)(count ? times[count - 1] : 0), count, done ? "true" : "false");
	for (i = 1; i < count; i++)
		fprintf(out, "%s%lld", i > 1 ? "," : "", (long long)((times[i] - times[i - 1]) / 1000));
	fputs("],\"output_token_ids\":[", out);
	for (i = 0; i < count; i++)
		fprintf(out, "%s%d", i ? "," : "", ids[i]);
	fputs("]}\n", out);
}

static void on_readable(struct connection *c)
{
	ssize_t got;
	int64_t ns;

	if (c->room - c->used < 65536)
		c->bytes = grown(c->bytes, c->room += c->room + 65536);
	got = recv(c->fd, c->bytes + c->used, c->room - c->used, MSG_DONTWAIT);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got <= 0 || c->request < 0)
		die("recv");
	ns = now_ns();
	if (c->first_byte_ns == 0)
		c->first_byte_ns = ns;
	c->used += got;
	if (c->marks_used == c->marks_room)
		c->marks = grown(c->marks, sizeof *c->marks * (c->marks_room += c->marks_room + 256));
	c->marks[c->marks_used].end = c->used;
	c->marks[c->marks_used++].ns = ns;
	if (c->used >= 5 && memcmp(c->bytes + c->used - 5, "0\r\n\r\n", 5) == 0) {
		write_record(c);
		finished++;
		c->request = -1;
		send_next(c, ns);
	}
}

int main(int argc, char **argv)
{
	struct connection *connections;
	struct epoll_event ready[256];
	struct rlimit files;
	int concurrency, i, count;

	if (argc != 6) {
		fprintf(stderr, "usage: %s PORT CONCURRENCY REQUESTS MAX_TOKENS OUT.jsonl\n", argv[0]);
		return 2;
	}
	address.sin_family = AF_INET;
	address.sin_port = htons(atoi(argv[1]));
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	concurrency = atoi(argv[2]);
	requests = atoi(argv[3]);
	max_tokens = atoi(argv[4]);
	if (concurrency > requests)
		concurrency = requests;
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	if ((out = fopen(argv[5], "w")) == NULL)
		die(argv[5]);
	epoll_fd = epoll_create1(0);
	connections = calloc(concurrency, sizeof *connections);
	for (i = 0; i < concurrency; i++)
		open_connection(&connections[i]);
	for (i = 0; i < concurrency; i++)
		send_next(&connections[i], now_ns());
	while (finished < requests) {
		count = epoll_wait(epoll_fd, ready, 256, -1);
		for (i = 0; i < count; i++)
			on_readable(ready[i].data.ptr);
	}
	if (fflush(out) != 0 || fsync(fileno(out)) != 0 || fclose(out) != 0)
		die(argv[5]);
	return 0;
}
