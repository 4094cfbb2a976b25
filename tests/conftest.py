"""For all tests: what a test sees must not depend on how the run was started, or on what else the machine has."""

import signal
import threading

# A run that was started in the background ignores Ctrl-C, and so would every process it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
