# The way in: keys from the ESP, never a password.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.services.spark.image;
  inherit (lib) mkOption types;

  # Not in /root/.ssh, which is the owner's (ssh-copy-id). sshd reads only what none but root can
  # write, folders included; %u, so that these keys open no other account.
  keysFolder = "/run/spark-keys";

  users = lib.attrValues config.users.users;
  sshd = config.services.openssh;
  locked = hash: hash == null || lib.hasPrefix "!" hash || hash == "*";
  withPassword = lib.filter (
    user:
    user.password != null
    || user.initialPassword != null
    || !locked user.hashedPassword
    || !locked user.initialHashedPassword
  ) users;
in
{
  options.services.spark.image.authorizedKeysFile = mkOption {
    # no blank, quote or percent sign: it stands in a unit
    type = types.strMatching "[A-Za-z0-9_+.~-]+(/[A-Za-z0-9_+.~-]+)*";
    default = "spark/authorized_keys";
    example = "spark/authorized_keys";
    description = ''
      File on the ESP with the owner's SSH keys for root. `spark-appliance image write` puts it
      there, or any computer once the image is on the disk. Without it, and without keys in the
      configuration, there is no way in: no password is ever set. Every boot reads it again;
      root's own `~/.ssh/authorized_keys` counts beside it and stays as it is.
    '';
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion =
          config.users.mutableUsers
          || sshd.enable
          || config.users.users.root.openssh.authorizedKeys.keys != [ ];
        message = ''
          services.spark.image.enable: nobody could log in. Enable services.openssh, or give
          users.users.root.openssh.authorizedKeys.keys.
        '';
      }
      {
        assertion = withPassword == [ ];
        message = ''
          services.spark.image.enable: everybody who has the image would know the password of
          ${lib.concatMapStringsSep ", " (user: user.name) withPassword}. Remove it from
          users.users (password, initialPassword, hashedPassword, initialHashedPassword); log in
          by key, or set a password on the node (users.users.<name>.hashedPasswordFile).
        '';
      }
      {
        assertion = config.services.getty.autologinUser == null;
        message = ''
          services.spark.image.enable: services.getty.autologinUser lets in whoever has a screen
          and a keyboard. Set it to null.
        '';
      }
      {
        assertion =
          sshd.enable
          ->
            sshd.settings.PasswordAuthentication == false
            && sshd.settings.KbdInteractiveAuthentication == false
            && lib.elem sshd.settings.PermitRootLogin [
              "prohibit-password"
              "without-password"
              "forced-commands-only"
              "no"
            ];
        message = ''
          services.spark.image.enable: SSH would accept passwords. Leave
          services.openssh.settings.PasswordAuthentication and KbdInteractiveAuthentication false
          and PermitRootLogin "prohibit-password".
        '';
      }
    ];

    services.openssh = {
      enable = lib.mkDefault true;
      authorizedKeysFiles = [ "${keysFolder}/%u" ];
      settings = {
        PasswordAuthentication = lib.mkDefault false;
        KbdInteractiveAuthentication = lib.mkDefault false;
        PermitRootLogin = lib.mkDefault "prohibit-password";
      };
    };

    systemd.services.spark-authorized-keys = {
      description = "Take the owner's SSH keys from the ESP";
      wantedBy = [ "multi-user.target" ];
      before = [ "sshd.service" ];
      unitConfig = {
        RequiresMountsFor = "/boot";
        ConditionFileNotEmpty = "/boot/${cfg.authorizedKeysFile}";
      };
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        ExecStart = "${lib.getExe' pkgs.coreutils "install"} -D --mode=0600 --owner=root --group=root /boot/${cfg.authorizedKeysFile} ${keysFolder}/root";
      };
    };
  };
}
