/**
  A node's own plan: what of the whole plan concerns that node. The same projection as
  `node_plan` of spark_appliance/node/projection.py, by the same data; a test holds them equal.

  # Inputs

  `plan`: a whole plan, or that node's own, which comes out as it went in.
  `name`: a node of it.
*/
{ lib }:
let
  rules = lib.importJSON ../spark_appliance/node/projection.json;
  peer = lib.filterAttrs (key: _: lib.elem key rules.peer);
in
plan: name:
let
  own = lib.findFirst (
    node: node.name == name
  ) (throw "node-plan: the plan has no node ${name}") plan.nodes;
  endsAt = cable: lib.any (end: end != null && end.node == name) [ cable.a cable.b ];
  part = {
    all = value: [ value ];
    head = value: lib.optional (own.role == "head") value;
    cables = value: [ (value // { cables = lib.filter endsAt value.cables; }) ];
    peers = map (node: if node.name == name then node else peer node);
    none = _: [ ];
  };
  parts = lib.mapAttrs (key: part.${rules.plan.${key} or "none"}) plan;
in
lib.mapAttrs (_: lib.head) (
  lib.filterAttrs (_: value: value != [ ]) (removeAttrs parts [ "nodes" ])
)
// {
  inherit (parts) nodes;
}
