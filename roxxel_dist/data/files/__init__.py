"""Files of tokens: found, checked, mapped and written."""
