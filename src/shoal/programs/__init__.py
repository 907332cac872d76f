"""Programs: the tasks that Shoal trains, with their data and models."""
