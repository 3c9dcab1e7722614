"""Training with several processes: their communication, the exchange of gradients, and a base that they share."""
