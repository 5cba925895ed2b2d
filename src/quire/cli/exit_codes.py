"""Exit codes of the commands other than 0, success, and 1, a check that failed."""

BAD_ARGUMENTS = 2  # as argparse has it
INTERRUPTED = 130  # 128 + SIGINT
READER_LEFT = 141  # 128 + SIGPIPE, as a shell reports it for `yes | head -1`
