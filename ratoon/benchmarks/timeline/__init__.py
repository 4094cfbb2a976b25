"""What device and threads do in the steps of an engine, moment by moment: `ratoon bench profile`."""
