"""What was published, as data: to compare with, and to say what a recipe should reach."""
