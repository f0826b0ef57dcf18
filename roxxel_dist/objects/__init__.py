"""Objects in a bucket: addresses, errors, and a store that retries. obstore is imported when it is first used."""
