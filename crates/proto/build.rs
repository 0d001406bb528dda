//! Compiles the contracts with protox (pure Rust: no `protoc` on the machine) into message types,
//! clients and servers, and keeps the descriptors for the contract test.
#![allow(clippy::disallowed_methods)]

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    for contract in
        ["csi", "snapshotmetadata", "differentialsnapshot", "listsnapshotdeltas", "node", "transfer"]
    {
        println!("cargo:rerun-if-changed=proto/{contract}.proto");
        let mut compiler = protox::Compiler::new(["proto"])?;
        compiler.include_imports(true).open_file(format!("{contract}.proto"))?;
        // Encoded by the compiler itself: the typed set would drop the custom options (csi_secret).
        std::fs::write(out.join(format!("{contract}.bin")), compiler.encode_file_descriptor_set())?;
        // The bytes of volumes: what arrived is handed on as it is, and not copied.
        tonic_prost_build::configure()
            .bytes(".deltapath.transfer.v1.ReadResponse")
            .compile_fds(compiler.file_descriptor_set())?;
    }
    Ok(())
}
