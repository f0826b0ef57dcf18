"""What runs on each host: the agent, the processes that kill what it leaves, and the start of a rank."""
