"""Labels of anybody's texts: one class of several, several labels at once, or a number."""
