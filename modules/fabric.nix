# The RoCE fabric: one networkd pair of files a rail, ARP, firewall, RDMA modules.
{
  config,
  lib,
  pkgs,
  utils,
  ...
}:
let
  cfg = config.services.spark.fabric;
  inherit (lib) mkOption types;

  rails = lib.attrValues cfg.rails;

  # On a board without ACPI the path has the bridge's platform device in front.
  pathsOf = rail: "pci-${rail.pci} platform-*-pci-${rail.pci}";
  matchOf =
    rail:
    if rail.pci != null then
      { Path = pathsOf rail; }
    else if rail.mac != null then
      { MACAddress = rail.mac; }
    else
      { Name = rail.netdev; };

  split = route: builtins.match "([0-9./]+) via ([0-9.]+) dev ([^ ]+)" route;

  routesOf =
    rail:
    lib.filter (parts: parts != null && lib.elemAt parts 2 == rail.netdev) (map split cfg.routes);

  octet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
  ipv4 = "(${octet}\\.){3}${octet}";
  isIpv4 = text: builtins.match ipv4 text != null;

  rail = types.submodule (
    { name, ... }:
    {
      options = {
        netdev = mkOption {
          type = types.strMatching "[^/ :]{1,15}";
          default = name;
          defaultText = lib.literalExpression "the attribute's name";
          example = "enp1s0f0np0";
          description = "Name that the network device gets.";
        };
        rdma = mkOption {
          type = types.str;
          example = "rocep1s0f0";
          description = "Name of its RDMA device.";
        };
        pci = mkOption {
          type = types.nullOr (types.strMatching "[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]");
          default = null;
          example = "0000:01:00.0";
          description = "PCI function by which the device is found, as lspci prints it.";
        };
        mac = mkOption {
          type = types.nullOr (types.strMatching "([0-9a-f]{2}:){5}[0-9a-f]{2}");
          default = null;
          example = "4c:bb:47:00:00:01";
          description = "MAC address by which the device is found when `pci` is null.";
        };
        cage = mkOption {
          type = types.str;
          default = "p0";
          example = "p1";
          description = "QSFP cage of the device; only reports use it.";
        };
        twin = mkOption {
          type = types.ints.between 0 1;
          default = 0;
          example = 1;
          description = "Which of the two devices of a cage this is; only reports use it.";
        };
        address = mkOption {
          type = types.strMatching "${ipv4}/(3[0-2]|[12]?[0-9])";
          example = "10.77.1.1/24";
          description = "IPv4 address with prefix length; every rail has a subnet of its own.";
        };
        mtu = mkOption {
          type = types.ints.between 1280 9216;
          default = 9000;
          example = 4200;
          description = "MTU in bytes; from 4200 up RDMA uses 4096-byte packets.";
        };
        peers = mkOption {
          type = types.listOf (
            types.submodule {
              options = {
                node = mkOption {
                  type = types.str;
                  example = "spark2";
                  description = "Name of the node.";
                };
                address = mkOption {
                  type = types.strMatching ipv4;
                  example = "10.77.1.2";
                  description = "Its address on this rail's subnet.";
                };
              };
            }
          );
          default = [ ];
          description = "The other ends; they are pinged before the engine starts.";
        };
      };
    }
  );

  # the bits of an address that are its subnet, as text
  subnetOf =
    rail:
    let
      parts = lib.splitString "/" rail.address;
      bits =
        octet: lib.fixedWidthString 8 "0" (lib.concatMapStrings toString (lib.toBaseDigits 2 octet));
    in
    lib.substring 0 (lib.toInt (lib.last parts)) (
      lib.concatMapStrings (octet: bits (lib.toInt octet)) (lib.splitString "." (lib.head parts))
    );
  overlap = a: b: lib.hasPrefix (subnetOf a) (subnetOf b) || lib.hasPrefix (subnetOf b) (subnetOf a);

  pairs = lib.concatLists (
    lib.imap1 (index: first: map (second: { inherit first second; }) (lib.drop index rails)) rails
  );
  inOneSubnet = lib.filter (pair: overlap pair.first pair.second) pairs;
  sameIn =
    field:
    lib.filter (
      pair: pair.first.${field} != null && pair.first.${field} == pair.second.${field}
    ) pairs;
  # what marks one device, and where to read it
  identities = {
    pci = "lspci -D | grep ConnectX shows the PCI function of each device";
    mac = "ip -br link shows the MAC address of each device";
  };
  deviceUnit = rail: "sys-subsystem-net-devices-${utils.escapeSystemdPath rail.netdev}.device";
in
{
  options.services.spark.fabric = {
    enable = lib.mkEnableOption "the RoCE fabric between Sparks";

    rails = mkOption {
      type = types.attrsOf rail;
      default = { };
      example = lib.literalExpression ''
        {
          enp1s0f0np0 = {
            rdma = "rocep1s0f0";
            pci = "0000:01:00.0";
            address = "10.77.1.1/24";
            peers = [ { node = "spark2"; address = "10.77.1.2"; } ];
          };
        }
      '';
      description = "The rails of this node by network device.";
    };

    peerAddresses = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [ "192.168.1.12" ];
      description = ''
        Management addresses of the other nodes. Everything from them is accepted: rendezvous,
        Gloo and NCCL's bootstrap use ephemeral TCP ports.
      '';
    };

    lanInterface = mkOption {
      type = types.nullOr types.str;
      default = null;
      example = "enP7s7";
      description = ''
        Network device whose first IPv4 address the engine's sockets use: `spark-node fabric` writes
        it to `/run/spark/fabric.env` as `SGLANG_HOST_IP`. Null: the engine finds one itself. The
        fleet module does not use it.
      '';
    };

    routes = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [ "10.77.9.0/24 via 10.77.1.2 dev enp1s0f0np0" ];
      description = "Extra routes, `DESTINATION via GATEWAY dev NETDEV`.";
    };

    sysctl = mkOption {
      type = types.attrsOf types.str;
      default = lib.mergeAttrsList (
        map (rail: {
          "net.ipv4.conf.${rail.netdev}.arp_ignore" = "1";
          "net.ipv4.conf.${rail.netdev}.arp_announce" = "2";
          "net.ipv4.conf.${rail.netdev}.rp_filter" = "1";
        }) rails
      );
      defaultText = lib.literalMD ''
        for each rail `arp_ignore` 1 and `arp_announce` 2, since the twins of a cage share one
        wire and must not answer for each other, and `rp_filter` 1
      '';
      example = {
        "net.ipv4.conf.enp1s0f0np0.rp_filter" = "2";
      };
      description = "Kernel settings of the rails.";
    };

    kernelModules = mkOption {
      type = types.listOf types.str;
      default = [
        "ib_uverbs"
        "mlx5_core"
        "mlx5_ib"
        "rdma_ucm"
      ];
      example = [ "mlx5_ib" ];
      description = ''
        Modules loaded at boot, after the initrd: kernel and initrd together must stay well under
        200 MB, or the firmware hangs.
      '';
    };

    softRoce = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = ''
        Make the RDMA devices in software on ordinary network devices, for tests.
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.rails != { };
        message = ''
          services.spark.fabric.rails is empty. Describe each cabled network device there, or
          set services.spark.fabric.enable = false on a node without cables.
        '';
      }
      {
        assertion = inOneSubnet == [ ];
        message = ''
          services.spark.fabric.rails: two rails are in one subnet (${
            lib.concatMapStringsSep "; " (
              { first, second }:
              "${first.netdev} ${first.address} and ${second.netdev} ${second.address}"
            ) inOneSubnet
          }). Answers would leave through the wrong one and RDMA would time out. Give every rail,
          twins of a cage too, an address in a subnet of its own.
        '';
      }
      {
        assertion = lib.all isIpv4 cfg.peerAddresses;
        message = ''
          services.spark.fabric.peerAddresses: ${
            lib.concatStringsSep ", " (lib.filter (address: !isIpv4 address) cfg.peerAddresses)
          } is no IPv4 address. The firewall is loaded before names can be resolved: give the
          node's address in the cluster file as IPv4 (nodes[].address).
        '';
      }
      {
        assertion = lib.all (route: split route != null) cfg.routes;
        message = ''
          services.spark.fabric.routes: write each route as "DESTINATION via GATEWAY dev NETDEV",
          for example "10.77.9.0/24 via 10.77.1.2 dev enp1s0f0np0".
        '';
      }
    ]
    ++ lib.mapAttrsToList (field: hint: {
      assertion = sameIn field == [ ];
      message = ''
        services.spark.fabric.rails: two rails have the same ${field} (${
          lib.concatMapStringsSep "; " (
            { first, second }: "${first.netdev} and ${second.netdev} ${first.${field}}"
          ) (sameIn field)
        }), so both mean one device. Give every rail the ${field} of its own device: ${hint}.
      '';
    }) identities
    ++ map (rail: {
      assertion = cfg.softRoce || rail.pci != null || rail.mac != null;
      message = ''
        services.spark.fabric.rails.${rail.netdev}: neither pci nor mac is given, so the device
        cannot be told from the others. Give pci (lspci -D | grep ConnectX) or mac.
      '';
    }) rails;

    networking.useNetworkd = true;
    systemd.network = {
      enable = true;
      links = lib.mapAttrs' (
        _: rail:
        lib.nameValuePair "10-spark-${rail.netdev}" {
          matchConfig = matchOf rail;
          linkConfig = {
            MTUBytes = toString rail.mtu;
          }
          // lib.optionalAttrs (rail.pci != null || rail.mac != null) { Name = rail.netdev; };
        }
      ) cfg.rails;
      networks = lib.mapAttrs' (
        _: rail:
        lib.nameValuePair "10-spark-${rail.netdev}" {
          # the .link file gave it this name
          matchConfig.Name = rail.netdev;
          address = [ rail.address ];
          networkConfig = {
            DHCP = "no";
            IPv6AcceptRA = false;
            LinkLocalAddressing = "no";
            # An address that goes with a loose cable comes back at another GID index.
            ConfigureWithoutCarrier = true;
            IgnoreCarrierLoss = true;
          };
          linkConfig = {
            MTUBytes = toString rail.mtu;
            # spark-fabric.service waits and says what is missing; the boot goes on.
            RequiredForOnline = "no";
          };
          routes = map (parts: {
            Destination = lib.elemAt parts 0;
            Gateway = lib.elemAt parts 1;
          }) (routesOf rail);
        }
      ) cfg.rails;
    };
    networking.networkmanager.unmanaged = map (rail: "interface-name:${rail.netdev}") rails;

    boot.kernelModules = cfg.kernelModules ++ lib.optional cfg.softRoce "rdma_rxe";
    boot.kernel.sysctl = cfg.sysctl;

    networking.nftables.enable = true;
    networking.firewall = {
      trustedInterfaces = map (rail: rail.netdev) rails;
      extraInputRules = lib.optionalString (cfg.peerAddresses != [ ]) ''
        ip saddr { ${lib.concatStringsSep ", " cfg.peerAddresses} } accept comment "other Sparks"
      '';
      checkReversePath = lib.mkIf (lib.any (
        rail: (cfg.sysctl."net.ipv4.conf.${rail.netdev}.rp_filter" or "1") != "1"
      ) rails) "loose";
    };

    services.spark.enabledUnits = [ "spark-fabric.service" ];
    services.spark.facts.lan_interface = cfg.lanInterface;
    services.spark.facts.rails = map (rail: {
      inherit (rail)
        netdev
        rdma
        cage
        twin
        address
        mtu
        ;
      pci = if rail.pci == null then "" else rail.pci;
      peers = map (peer: { inherit (peer) node address; }) rail.peers;
    }) rails;

    systemd.services.spark-soft-roce = lib.mkIf cfg.softRoce {
      description = "RDMA devices in software for the fabric";
      wantedBy = [ "multi-user.target" ];
      before = [ "spark-fabric.service" ];
      requiredBy = [ "spark-fabric.service" ];
      after = [
        "systemd-modules-load.service"
        "systemd-networkd.service"
      ]
      ++ map deviceUnit rails;
      path = [ pkgs.iproute2 ];
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
      };
      script = lib.concatMapStrings (rail: ''
        rdma link show ${rail.rdma}/1 >/dev/null 2>&1 ||
          rdma link add ${rail.rdma} type rxe netdev ${rail.netdev}
      '') rails;
      preStop = lib.concatMapStrings (rail: ''
        rdma link delete ${rail.rdma}
      '') rails;
    };
  };
}
