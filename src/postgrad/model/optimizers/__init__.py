"""One optimizer step: masters, gradients in float32, state in 8 bits or in host memory."""
