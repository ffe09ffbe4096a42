"""What `kvortex doctor` looks at: each check turns facts into findings and touches nothing itself."""
