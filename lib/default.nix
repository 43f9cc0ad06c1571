# What the flake is made of: packages, modules, and a NixOS system for every node of a plan.
{
  nixpkgs,
  poetry2nix,
  nixos-dgx-spark,
}:
let
  inherit (nixpkgs) lib;

  # Version of the plan's schema (PLAN_VERSION in spark_appliance/model/plan.py).
  planVersion = 1;

  packagesFor = pkgs: import ../pkgs { inherit pkgs poetry2nix; };

  nodePlan = import ./node-plan.nix { inherit lib; };

  modules = import ../modules {
    inherit
      packagesFor
      planVersion
      nodePlan
      nixos-dgx-spark
      ;
  };

  readPlan =
    lock:
    let
      plan = lib.importJSON lock;
    in
    if plan.version or null == planVersion then
      plan
    else
      throw "${toString lock}: this is no plan of version ${toString planVersion}; render it anew: spark-appliance render cluster.yaml";

  /**
    One NixOS system for each NixOS node of a plan, by node name.

    # Inputs

    `lock`: the plan, `cluster.lock.json`.
    `cluster`: the cluster file; evaluation stops when the plan is older than it.
    `modules`: modules of every node (users, keys, time zone).
    `nodeModules`: further modules by node name.
    `specialArgs`: as for `nixosSystem`.

    Nodes whose `system` is `dgx-os` are left out: the command line serves them.
  */
  mkFleet =
    {
      lock,
      cluster ? null,
      modules ? [ ],
      nodeModules ? { },
      specialArgs ? { },
    }:
    let
      plan = readPlan lock;
      nodes = lib.filter (node: node.system == "nixos") plan.nodes;
      unknown = lib.subtractLists (map (node: node.name) plan.nodes) (lib.attrNames nodeModules);
      host =
        node:
        lib.nixosSystem {
          inherit specialArgs;
          modules = [
            ownModules.default
            ownModules.image
            {
              nixpkgs.hostPlatform = lib.mkDefault "aarch64-linux";
              hardware.spark.enable = lib.mkDefault true;
              services.spark = {
                image.enable = lib.mkDefault true;
                fleet = {
                  enable = true;
                  inherit plan;
                  clusterFile = cluster;
                  node = node.name;
                };
              };
            }
          ]
          ++ modules
          ++ nodeModules.${node.name} or [ ];
        };
    in
    if unknown != [ ] then
      throw "mkFleet: nodeModules has ${lib.concatStringsSep ", " unknown}, which the plan does not have; it has ${
        lib.concatMapStringsSep ", " (node: node.name) plan.nodes
      }"
    else
      lib.listToAttrs (map (node: lib.nameValuePair node.name (host node)) nodes);

  ownModules = modules;

  # ---- what the flake itself shows ----------------------------------------------------------
  exampleDirectories = lib.attrNames (
    lib.filterAttrs (
      name: type: type == "directory" && builtins.pathExists (../examples + "/${name}/cluster.lock.json")
    ) (builtins.readDir ../examples)
  );

  stateVersion = {
    system.stateVersion = "26.05";
  };

  # The plan of an example as NixOS nodes: of one for DGX OS it lies beside the other.
  nixosLock =
    name:
    let
      beside = ../examples + "/${name}/cluster.nixos.lock.json";
    in
    if builtins.pathExists beside then beside else ../examples + "/${name}/cluster.lock.json";

  # All nodes of all examples, named CLUSTER-NODE.
  exampleHosts = lib.concatMapAttrs (
    name: _:
    let
      lock = nixosLock name;
    in
    lib.mapAttrs' (node: lib.nameValuePair "${(readPlan lock).name}-${node}") (mkFleet {
      inherit lock;
      cluster = ../examples + "/${name}/cluster.yaml";
      modules = [ stateVersion ];
    })
  ) (lib.genAttrs exampleDirectories (_: null));

  /**
    The system of an image that all nodes of a cluster share: it boots, finds out which node of the
    plan it is, lets the owner in by key and waits for a rollout. The image itself is
    `config.system.build.image`.

    # Inputs

    `lock`: the plan, `cluster.lock.json`, or null: it is put on the ESP later.
    `modules`: modules for every node (keys, time zone).
    `specialArgs`: as for `nixosSystem`.
  */
  mkAppliance =
    {
      lock ? null,
      modules ? [ ],
      specialArgs ? { },
    }:
    lib.nixosSystem {
      inherit specialArgs;
      modules = [
        ownModules.default
        ownModules.image
        {
          nixpkgs.hostPlatform = lib.mkDefault "aarch64-linux";
          networking.hostName = lib.mkDefault "spark";
          hardware.spark.enable = lib.mkDefault true;
          services.spark.image = {
            enable = true;
            plan = lock;
            # whether the plan wants it is known too late: the root grows before anything is read
            engram.enable = lib.mkDefault true;
          };
        }
      ]
      ++ modules;
    };

  appliance = mkAppliance { modules = [ stateVersion ]; };

  systems = [
    "aarch64-linux"
    "x86_64-linux"
    "aarch64-darwin"
  ];

  # { packages.SYSTEM, checks.SYSTEM, ... } out of SYSTEM -> { packages, checks, ... }
  forSystems =
    outputs:
    let
      each = lib.genAttrs systems (
        system:
        outputs {
          inherit system;
          pkgs = import nixpkgs {
            inherit system;
            # CUDA wheels and NVIDIA's driver have their own licences
            config.allowUnfree = true;
          };
        }
      );
    in
    lib.genAttrs [ "packages" "apps" "checks" "devShells" "formatter" ] (
      name: lib.mapAttrs (_: value: value.${name}) each
    );
in
{
  inherit
    appliance
    exampleDirectories
    exampleHosts
    forSystems
    lib
    mkAppliance
    mkFleet
    modules
    nodePlan
    packagesFor
    planVersion
    readPlan
    ;
  overlay = final: _: packagesFor final;
}
