"""Before a job starts: what the hosts say of themselves, checks of it, and the choice of hosts."""
