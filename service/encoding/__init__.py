"""From requests to tensors and back; training and serving share every line of it. Pure."""
