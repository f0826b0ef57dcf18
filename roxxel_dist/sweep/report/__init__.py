"""What a study found, as text, HTML and plots."""
