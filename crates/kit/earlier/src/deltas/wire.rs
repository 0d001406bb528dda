//! The JSON that the aggregated API server and cbt-http speak: the messages of ListSnapshotDeltas, with their fields' names in
//! JSON's way.

use std::collections::HashMap;

use proto::deltas::{
    BlockSnapshotChangedBlock, BlockSnapshotChangedBlockToken, ListSnapshotDeltasRequest,
    ListSnapshotDeltasResponse,
};
use serde::{Deserialize, Serialize};

/// ListSnapshotDeltasRequest. Never logged: it may hold secrets.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Request {
    pub from_snapshot_id: String,
    pub to_snapshot_id: String,
    pub secrets: HashMap<String, String>,
    pub max_entries: i32,
    pub starting_token: String,
}

/// ListSnapshotDeltasResponse.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Response {
    pub volume_size_bytes: u64,
    #[serde(default)]
    pub next_token: String,
    pub changed_blocks: Vec<Block>,
}

/// BlockSnapshotChangedBlock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Block {
    /// In bytes.
    pub offset: u64,
    pub block_size_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<Token>,
}

/// BlockSnapshotChangedBlockToken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Token {
    pub token: String,
    /// RFC 3339.
    pub issuance_time: String,
    pub ttl_seconds: i32,
}

impl From<Request> for ListSnapshotDeltasRequest {
    fn from(request: Request) -> Self {
        let Request { from_snapshot_id, to_snapshot_id, secrets, max_entries, starting_token } = request;
        ListSnapshotDeltasRequest { from_snapshot_id, to_snapshot_id, secrets, max_entries, starting_token }
    }
}

impl From<ListSnapshotDeltasResponse> for Response {
    fn from(response: ListSnapshotDeltasResponse) -> Self {
        let ListSnapshotDeltasResponse { volume_size_bytes, next_token, changed_blocks } = response;
        let changed_blocks = changed_blocks.into_iter().map(Block::from).collect();
        Response { volume_size_bytes, next_token, changed_blocks }
    }
}

impl From<BlockSnapshotChangedBlock> for Block {
    fn from(block: BlockSnapshotChangedBlock) -> Self {
        let BlockSnapshotChangedBlock { offset, block_size_bytes, token } = block;
        Block { offset, block_size_bytes, token: token.map(Token::from) }
    }
}

impl From<BlockSnapshotChangedBlockToken> for Token {
    fn from(token: BlockSnapshotChangedBlockToken) -> Self {
        let BlockSnapshotChangedBlockToken { token, issuance_time, ttl_seconds } = token;
        Token { token, issuance_time: issuance_time.unwrap_or_default().to_string(), ttl_seconds }
    }
}
