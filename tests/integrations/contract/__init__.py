"""The contract with engines' own classes, for each version of the window (`make engines`)."""
