"""Between the controller and a program on a host: messages, one connection, all connections."""
