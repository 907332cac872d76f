"""Who starts the nodes, and how they hear from each other before and after training."""
