/* The logger that the driver hands to a plugin's init: formats, then calls into Rust. */
#include <stdarg.h>
#include <stdio.h>

extern void vccl_driver_log_line(int level, unsigned long flags, const char *where, int line, const char *text);

void vccl_driver_log(int level, unsigned long flags, const char *where, int line, const char *fmt, ...) {
  char text[4096];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  vccl_driver_log_line(level, flags, where, line, text);
}
