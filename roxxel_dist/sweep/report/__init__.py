"""The findings of a study, as text, HTML and plots."""
