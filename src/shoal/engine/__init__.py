"""What makes a node's verbs work: parts that know nothing of strategies, nor of Node."""
