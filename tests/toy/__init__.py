"""A method small enough to test the launcher with: logistic regression by gradient descent."""
