"""What an algorithm is written in: Node has the verbs, Strategy says what it answers."""
