"""What the machine can do, found by trying it: each probe runs in a process of its own, so that a crash is a result."""
