"""What all tests need, whoever starts them."""

import signal

# A shell starts what runs in the background with Ctrl-C ignored, and every child inherits that; then nothing could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
