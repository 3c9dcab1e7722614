"""Training with several processes: their communication, and the exchange of gradients."""
