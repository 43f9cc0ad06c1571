# One node of a plan: the plan becomes the options of the other modules, and nothing is decided.
{ planVersion, nodePlan }:
{
  config,
  lib,
  ...
}:
let
  cfg = config.services.spark.fleet;
  inherit (lib) mkOption types;

  version = cfg.plan.version or null;
  names = map (node: node.name) (cfg.plan.nodes or [ ]);
  found = lib.filter (node: node.name == cfg.node) cfg.plan.nodes;
  readable = version == planVersion && lib.elem cfg.node names;

  node = lib.head found;
  inherit (cfg) plan;
  count = lib.length plan.nodes;
  clusterLines = import ../lib/cluster-lines.nix { inherit lib; } cfg.clusterFile;
  units = lib.listToAttrs (map (unit: lib.nameValuePair unit.name unit) node.units);
in
{
  options.services.spark.fleet = {
    enable = lib.mkEnableOption "this machine as a node of a plan (cluster.lock.json)";

    plan = mkOption {
      type = types.attrsOf types.anything;
      example = lib.literalExpression "lib.importJSON ./cluster.lock.json";
      description = "The plan that `spark-appliance render` wrote.";
    };

    node = mkOption {
      type = types.str;
      default = config.networking.hostName;
      defaultText = lib.literalExpression "config.networking.hostName";
      example = "spark1";
      description = "Which node of the plan this is.";
    };

    clusterSha256 = mkOption {
      type = types.nullOr (types.strMatching "[0-9a-f]{64}");
      default = null;
      example = "3f0c0f2b1c1a4d0e9c6a3c1d7b5d0f1a3f0c0f2b1c1a4d0e9c6a3c1d7b5d0f1a";
      description = ''
        Hash of the cluster file that the plan must have been rendered from, or null to accept
        any (`spark-appliance render --check` compares plan and cluster file).
      '';
    };

    clusterFile = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = lib.literalExpression "./cluster.yaml";
      description = ''
        The cluster file itself: evaluation stops when the plan was rendered from another one.
        Comments do not count. It is read at evaluation only and does not reach the node.
      '';
    };

    createEngramFilesystem = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = "Make the Engram file system of the plan's device when it is empty.";
    };
  };

  config = lib.mkIf cfg.enable (
    lib.mkMerge [
      {
        assertions = [
          {
            assertion = version == planVersion;
            message = ''
              services.spark.fleet.plan has version ${builtins.toJSON version}, these modules read
              version ${toString planVersion}. Render it anew with the same release:
              spark-appliance render cluster.yaml
            '';
          }
          {
            assertion = version == planVersion -> lib.elem cfg.node names;
            message = ''
              services.spark.fleet.node is "${cfg.node}", the plan has ${lib.concatStringsSep ", " names}.
              Set services.spark.fleet.node (or networking.hostName) to one of them.
            '';
          }
          {
            assertion =
              cfg.clusterSha256 != null -> (plan.source.cluster_sha256 or null) == cfg.clusterSha256;
            message = ''
              services.spark.fleet.plan was rendered from another cluster file (sha256
              ${toString (plan.source.cluster_sha256 or "missing")}, wanted ${toString cfg.clusterSha256}).
              Render it anew: spark-appliance render cluster.yaml
            '';
          }
          {
            assertion =
              cfg.clusterFile != null -> (plan.source.cluster_lines_sha256 or null) == clusterLines;
            message = ''
              services.spark.fleet.plan was rendered from another content of the cluster file
              ${baseNameOf (toString cfg.clusterFile)} than it has now. Render it anew, and commit both:
              spark-appliance render cluster.yaml
            '';
          }
          {
            assertion = readable -> node.system == "nixos";
            message = ''
              services.spark.fleet: ${cfg.node} is a ${node.system} node in the plan, its units start
              containers. Write "system: nixos" for it in the cluster file and render again.
            '';
          }
        ];
      }
      (lib.mkIf (readable && node.system == "nixos") {
        networking.hostName = lib.mkDefault node.name;

        services.spark = {
          nodeName = node.name;
          byHand = false;
          # not the whole plan: what concerns other nodes must not change this one
          plan = nodePlan plan node.name;
          inherit units;

          fabric = lib.mkIf (node.rails != [ ]) {
            enable = true;
            rails = lib.listToAttrs (
              map (
                rail:
                lib.nameValuePair rail.netdev {
                  inherit (rail)
                    netdev
                    rdma
                    pci
                    cage
                    twin
                    address
                    mtu
                    peers
                    ;
                }
              ) node.rails
            );
            inherit (node) routes sysctl;
            kernelModules = node.kernel_modules;
            peerAddresses = node.firewall.peer_addresses;
          };

          weights = {
            enable = true;
            path = plan.model.path;
            export = lib.mkIf (node.weights.export != null) {
              enable = true;
              inherit (node.weights.export)
                clients
                options
                threads
                rdma
                ;
            };
            mount = lib.mkIf (node.weights.mount != null) {
              enable = true;
              inherit (node.weights.mount) what type options;
            };
          };

          engram = lib.mkIf (node.engram != null) {
            enable = true;
            inherit (node.engram) directory device files;
            createFilesystem = cfg.createEngramFilesystem;
            cacheBytes = node.engram.cache_bytes;
            packArgv = node.engram.pack_argv;
          };

          guard = {
            enable = true;
            startBytes = node.guard.start_bytes;
            steadyBytes = node.guard.steady_bytes;
            inherit (node.guard) interval;
          };

          engine = {
            enable = true;
            inherit (node) argv env rank;
            ranks = count;
            apiKeyFile = if node.role == "head" then plan.api.key_file else null;
            configFile = node.config_file;
            cacheDirectory = node.cache_directory;
            ncclLibrary = if node.nccl_library == null then null else node.nccl_library.path;
            apiPort = node.firewall.api_port;
          };

          router = lib.mkIf (plan.router or null != null && node.role == "head") {
            enable = true;
            inherit (plan.router) argv version;
            apiKeyFile = plan.api.key_file;
            # its url names the loopback address when nobody else reaches it
            port = if lib.hasPrefix "http://127." plan.router.url then null else plan.router.port;
          };
        };

        # The address by which the other nodes and the owner know this one, beside what DHCP gives
        # (routes, name servers). Settings of the owner, networking.interfaces, come before it.
        networking.useNetworkd = lib.mkIf (node.lan_address or null != null) true;
        systemd.network.networks."45-spark-lan" = lib.mkIf (node.lan_address or null != null) {
          matchConfig.Name = node.lan_interface;
          networkConfig.DHCP = "yes";
          addresses = [
            {
              Address = node.lan_address;
              DuplicateAddressDetection = "ipv4";
            }
          ];
        };

        # settings of the host that hold without cables too
        boot.kernel.sysctl = lib.mkIf (node.rails == [ ]) node.sysctl;
        boot.kernelModules = lib.mkIf (node.rails == [ ]) node.kernel_modules;
      })
    ]
  );
}
