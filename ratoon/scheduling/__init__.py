"""Policy: what runs in a step. The scheduler, its queues, admission and branches. No torch."""
