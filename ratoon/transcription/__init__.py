"""The way from a recording to its text: decoding, windows, timestamps, languages, formats. The engine is the
caller's."""
