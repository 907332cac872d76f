"""The vocabulary every other room speaks; imports torch and the standard library only."""
