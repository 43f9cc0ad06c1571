# What all nodes have in common. The cluster itself is in cluster.yaml.
{
  system.stateVersion = "26.05";
  time.timeZone = "UTC";

  # Without a key nobody gets in: there is no password.
  users.users.root.openssh.authorizedKeys.keys = [
    # "ssh-ed25519 AAAA... you@laptop"
  ];
}
