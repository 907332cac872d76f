"""What is trained: tasks with their data, and the models they are made of."""
