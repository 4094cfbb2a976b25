"""Keys and values on the device: their memory, tensors, geometry, and copies of blocks."""
