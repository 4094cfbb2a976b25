"""Engine outputs to answers of the protocol, whole or as chunks of a stream: plain objects, ready to be encoded."""
