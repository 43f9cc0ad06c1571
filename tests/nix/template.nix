# The template's outputs, with this flake as its input.
{ flake }:
let
  outputs = (import ../../templates/default/flake.nix).outputs { spark-appliance = flake; };
in
{
  hosts = builtins.mapAttrs (_: host: host.config.networking.hostName) outputs.nixosConfigurations;
  image = outputs.packages.aarch64-linux.spark1.drvPath;
  firstBoot = outputs.packages.aarch64-linux.image.drvPath;
  app = outputs.apps.x86_64-linux.default.type;
}
