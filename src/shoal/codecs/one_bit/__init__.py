"""1-bit SGD: the sign of each element and two means a column."""
