//! What kube-apiserver and clients read to learn what is served here: discovery, and OpenAPI in both versions. Pure.

use serde_json::{Value, json};

use super::resource::{GROUP, KIND, PLURAL, VERSION};

const SCHEMA: &str = "io.k8s.storage.cbt.v1alpha1.VolumeSnapshotDelta";

fn group_version() -> String {
    format!("{GROUP}/{VERSION}")
}

pub fn path() -> String {
    format!("/apis/{GROUP}/{VERSION}/namespaces/{{namespace}}/{PLURAL}")
}

/// `/apis/GROUP`.
pub fn group() -> Value {
    let version = json!({"groupVersion": group_version(), "version": VERSION});
    json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version],
        "preferredVersion": version,
    })
}

/// `/apis`.
pub fn groups() -> Value {
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group()]})
}

/// `/apis/GROUP/VERSION`.
pub fn resources() -> Value {
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version(),
        "resources": [{
            "name": PLURAL, "singularName": "volumesnapshotdelta", "namespaced": true, "kind": KIND,
            "shortNames": ["vsd"], "verbs": ["create"],
        }],
    })
}

/// `/apis` for those who want all in one document.
pub fn discovery() -> Value {
    json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {},
        "items": [{
            "metadata": {"name": GROUP, "creationTimestamp": null},
            "versions": [{
                "version": VERSION, "freshness": "Current",
                "resources": [{
                    "resource": PLURAL, "singularResource": "volumesnapshotdelta", "scope": "Namespaced",
                    "responseKind": {"group": GROUP, "version": VERSION, "kind": KIND},
                    "shortNames": ["vsd"], "verbs": ["create"],
                }],
            }],
        }],
    })
}

fn schema() -> Value {
    let text = |about: &str| json!({"type": "string", "description": about});
    let number =
        |about: &str| json!({"type": "integer", "format": "int64", "minimum": 0, "description": about});
    json!({
        "type": "object",
        "description": "Asks for the blocks that changed between two VolumeSnapshots of its namespace. It is answered at once, in its status, and never stored.",
        "required": ["spec"],
        "properties": {
            "apiVersion": text("cbt.storage.k8s.io/v1alpha1"),
            "kind": text("VolumeSnapshotDelta"),
            "metadata": {"type": "object", "description": "Name, labels and the like. The name means nothing."},
            "spec": {
                "type": "object",
                "description": "What is asked.",
                "required": ["targetVolumeSnapshotName"],
                "properties": {
                    "baseVolumeSnapshotName": text("The older VolumeSnapshot. Without it, all blocks that the target holds are listed."),
                    "targetVolumeSnapshotName": text("The VolumeSnapshot whose blocks are listed."),
                    "mode": text("What is listed: block, which is the default. There is no other."),
                    "volumeSnapshotDeltaSecretRef": {
                        "type": "object",
                        "description": "A Secret for the CSI driver.",
                        "required": ["name", "namespace"],
                        "properties": {
                            "name": text("Its name."),
                            "namespace": text("Its namespace."),
                        },
                    },
                    "limit": number("Entries in the answer at most. The server has a maximum, which is the default too."),
                    "offset": number("Index of the first block that counts: 0, or continue of the answer before."),
                },
            },
            "status": {
                "type": "object",
                "description": "The answer.",
                "properties": {
                    "state": number("0: all is listed; 1: there is more; 2: failed."),
                    "error": text("Why it has failed."),
                    "limit": number("Entries in this answer at most."),
                    "offset": number("Index of the first block that counts."),
                    "continue": number("Index of the block to continue from: the offset of the next request."),
                    "changedBlocks": {
                        "type": "array",
                        "description": "The blocks, in order.",
                        "items": {
                            "type": "object",
                            "properties": {
                                "offset": number("Index of the block: the byte where it begins, divided by blockSizeBytes."),
                                "blockSizeBytes": number("Bytes in the block."),
                                "dataToken": {
                                    "type": "object",
                                    "description": "By which the data of the block is asked for, at the address in the driver's DriverDiscovery, followed by /data.",
                                    "properties": {
                                        "token": text("The token, as a bearer token."),
                                        "issuanceTime": text("When it was made."),
                                        "ttl": text("How long it is good for."),
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
        "x-kubernetes-group-version-kind": [kind()],
    })
}

fn kind() -> Value {
    json!({"group": GROUP, "version": VERSION, "kind": KIND})
}

/// Queries that a create may have.
const QUERIES: [(&str, &str); 4] = [
    ("dryRun", "All: nothing is stored anyway."),
    ("fieldManager", "Means nothing here."),
    ("fieldValidation", "What becomes of unknown fields: Ignore, Warn (the default) or Strict."),
    ("pretty", "Means nothing here."),
];

pub fn openapi_v2() -> Value {
    let reference = json!({"$ref": format!("#/definitions/{SCHEMA}")});
    let queries = QUERIES.iter().map(
        |(name, about)| json!({"name": name, "in": "query", "type": "string", "uniqueItems": true, "description": about}),
    );
    let body = json!({"name": "body", "in": "body", "required": true, "schema": reference});
    let parameters: Vec<_> = std::iter::once(body).chain(queries).collect();
    json!({
        "swagger": "2.0",
        "info": {"title": "cbt-earlier aggregated", "version": env!("CARGO_PKG_VERSION")},
        "paths": {path(): {
            "parameters": [{"name": "namespace", "in": "path", "type": "string", "required": true, "uniqueItems": true}],
            "post": {
                "description": "asks for changed blocks",
                "operationId": "createCbtStorageV1alpha1NamespacedVolumeSnapshotDelta",
                "consumes": ["application/json", "application/yaml"],
                "produces": ["application/json", "application/yaml"],
                "schemes": ["https"],
                "tags": ["cbtStorage_v1alpha1"],
                "parameters": parameters,
                "responses": {
                    "201": {"description": "Created", "schema": reference},
                    "401": {"description": "Unauthorized"},
                },
                "x-kubernetes-action": "post",
                "x-kubernetes-group-version-kind": kind(),
            },
        }},
        "definitions": {SCHEMA: schema()},
    })
}

/// `/openapi/v3`: where the documents are. The hash lets clients keep a document.
pub fn openapi_v3_index() -> Value {
    let hash = blake3::hash(openapi_v3().to_string().as_bytes()).to_hex();
    let at = format!("apis/{GROUP}/{VERSION}");
    let url = format!("/openapi/v3/{at}?hash={}", hash.to_uppercase());
    json!({"paths": {at: {"serverRelativeURL": url}}})
}

/// `/openapi/v3/apis/GROUP/VERSION`.
pub fn openapi_v3() -> Value {
    let content = json!({"schema": {"$ref": format!("#/components/schemas/{SCHEMA}")}});
    let both = json!({"application/json": content, "application/yaml": content});
    let queries = QUERIES.iter().map(
        |(name, about)| json!({"name": name, "in": "query", "description": about, "schema": {"type": "string", "uniqueItems": true}}),
    );
    json!({
        "openapi": "3.0.0",
        "info": {"title": "cbt-earlier aggregated", "version": env!("CARGO_PKG_VERSION")},
        "paths": {path(): {
            "parameters": [
                {"name": "namespace", "in": "path", "required": true, "schema": {"type": "string", "uniqueItems": true}},
            ],
            "post": {
                "description": "asks for changed blocks",
                "operationId": "createCbtStorageV1alpha1NamespacedVolumeSnapshotDelta",
                "tags": ["cbtStorage_v1alpha1"],
                "parameters": queries.collect::<Vec<_>>(),
                "requestBody": {"required": true, "content": both},
                "responses": {
                    "201": {"description": "Created", "content": both},
                    "401": {"description": "Unauthorized"},
                },
                "x-kubernetes-action": "post",
                "x-kubernetes-group-version-kind": kind(),
            },
        }},
        "components": {"schemas": {SCHEMA: schema()}},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reference leads to a schema, or kubectl explains nothing.
    #[test]
    fn references_lead_somewhere() {
        for document in [openapi_v2(), openapi_v3()] {
            let text = document.to_string();
            let references: Vec<_> = text.split("\"$ref\":\"#").skip(1).collect();
            assert!(references.len() >= 2, "{text}");
            for reference in references {
                let at = reference.split('"').next().expect("a path");
                assert!(document.pointer(at).is_some(), "{at}");
            }
        }
    }

    #[test]
    fn the_index_leads_to_the_document() {
        let index = openapi_v3_index();
        let url = index.pointer("/paths/apis~1cbt.storage.k8s.io~1v1alpha1/serverRelativeURL");
        let url = url.and_then(Value::as_str).expect("a URL");
        assert!(url.starts_with("/openapi/v3/apis/cbt.storage.k8s.io/v1alpha1?hash="), "{url}");
    }
}
