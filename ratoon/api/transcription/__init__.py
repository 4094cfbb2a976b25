"""From a recording to its text: decoding, windows, timestamps, languages, formats. The engine is somebody else's."""
