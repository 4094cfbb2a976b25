"""Images and videos of requests, from what a caller gives to what a model's encoder reads: decoding, resizing, the
order of patches, placeholders, rope positions and content hashes. Without torch; encoders are in `models`."""
