"""Links between the controller and programs on hosts: messages, one connection, all connections."""
