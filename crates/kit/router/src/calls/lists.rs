//! What is made of the answers of many nodes: lists in pages, and capacities.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use metrics::counter;
use prost::Message;
use tonic::{Code, Status};

use super::{AT_ONCE, Router, Work, answers, decode, no_node};
use crate::node::Node;
use crate::nodes::Missing;
use crate::pages::{self, Asked, MAX_PAGE, Page, Start};
use crate::placement;

impl Router {
    /// A page of what all nodes list. Where a node does not answer, the others' entries are an answer only if the list `may_lack`
    /// some. No node gets the secrets: they may be another's.
    pub(super) async fn list(&self, work: &mut Work<'_>, may_lack: bool) -> Result<Bytes, Status> {
        let method = work.method;
        let asked: Asked = decode(&work.message)?;
        let Ok(limit) = usize::try_from(asked.max_entries) else {
            // Any node says what is wrong with it.
            return self.ask_any(work).await;
        };
        let limit = if limit == 0 { MAX_PAGE } else { limit.min(MAX_PAGE) };
        let start = Start::parse(&asked.starting_token)?;
        let mut missing = self.nodes.away();
        let nodes: Vec<(Arc<Node>, String)> = self
            .nodes
            .up()
            .into_iter()
            .filter_map(|node| start.at(node.key).map(str::to_owned).map(|token| (node, token)))
            .collect();
        if nodes.is_empty() && self.nodes.up().is_empty() {
            return Err(no_node());
        }
        let last_key = nodes.last().map(|(node, _)| node.key);
        let (path, deadline, message) = (method.path, work.deadline, method.without_secrets(&work.message)?);
        let ask = |node: Arc<Node>, token: String, limit: usize| {
            let asked = Asked { max_entries: limit as i32, starting_token: token };
            let request = asked.instead_of_those_in(&message);
            async move {
                let page = node.while_up(node.call(path, request, deadline)).await;
                let page = page.and_then(|page| {
                    let page = answers::answered(method, &node, &page)?;
                    answers::check_page(method, &node, &asked, &page)?;
                    Ok(page)
                });
                (node, page)
            }
        };
        let mut page = Page::default();
        let mut pages = stream::iter(nodes)
            .map(|(node, token)| {
                let again = token.clone();
                let asked = ask(node, token, limit);
                async move { (again, asked.await) }
            })
            // In order, a few ahead.
            .buffered(AT_ONCE / 2);
        while let Some((token, (node, answer))) = pages.next().await {
            let room = limit - page.entries.len();
            let answer = match answer {
                // It has more than there is room for: the part that fits, with the token behind it.
                Ok(answer) if answer.entries.len() > room => ask(node.clone(), token, room).await.1,
                answer => answer,
            };
            match answer {
                Ok(mut answer) => {
                    page.entries.append(&mut answer.entries);
                    page.next_token = answer.next_token;
                }
                Err(status) if status.code() == Code::Unavailable => {
                    let (name, why) = (node.name.clone(), "which does not answer".to_owned());
                    missing.push(Missing { name, why, node: Some(node) });
                    continue;
                }
                Err(status) => return Err(status),
            }
            if !page.next_token.is_empty() {
                break;
            }
            if page.entries.len() >= limit && last_key != Some(node.key) {
                page.next_token = pages::after(node.key);
                break;
            }
        }
        if !missing.is_empty() {
            for node in &missing {
                counter!(
                    "deltapath_router_lists_incomplete_total",
                    "method" => method.name(),
                    "node" => node.name.clone()
                )
                .increment(1);
            }
            let nodes: Vec<String> =
                missing.iter().map(|Missing { name, why, .. }| format!("{name}, {why}")).collect();
            let nodes = nodes.join("; and on ");
            tracing::warn!(method = method.name(), nodes, "nodes are missing from a list");
            if !may_lack {
                return Err(Status::unavailable(format!(
                    "the list would lack what is on {nodes}: try again when all nodes can be asked"
                )));
            }
        }
        Ok(page.encode_to_vec().into())
    }

    /// The sum of what the nodes of a topology have, and the largest volume that one of them can make. A node that does not
    /// answer has nothing to offer.
    pub(super) async fn get_capacity(&self, work: &mut Work<'_>) -> Result<Bytes, Status> {
        let request: proto::GetCapacityRequest = decode(&work.message)?;
        let nodes = self.nodes.up().into_iter().filter(|node| {
            request.accessible_topology.as_ref().is_none_or(|asked| placement::fits(&node.topology, asked))
        });
        let (method, deadline, message) = (work.method, work.deadline, work.message.clone());
        let ask = |node: Arc<Node>| {
            let message = message.clone();
            async move {
                let answer = node.while_up(node.call(method.path, message.clone(), deadline)).await?;
                answers::check(method, &node, &message, &answer).map(|()| answer)
            }
        };
        let answers: Vec<_> = stream::iter(nodes).map(ask).buffer_unordered(AT_ONCE).collect().await;
        let mut sum = proto::GetCapacityResponse { maximum_volume_size: Some(0), ..Default::default() };
        for answer in answers {
            let answer = match answer {
                Ok(answer) => decode::<proto::GetCapacityResponse>(&answer)?,
                Err(status) if status.code() == Code::Unavailable => continue,
                Err(status) => return Err(status),
            };
            sum.available_capacity = sum.available_capacity.saturating_add(answer.available_capacity);
            sum.maximum_volume_size = sum.maximum_volume_size.max(answer.maximum_volume_size);
            let least = [sum.minimum_volume_size, answer.minimum_volume_size];
            sum.minimum_volume_size = least.into_iter().flatten().min();
        }
        Ok(sum.encode_to_vec().into())
    }
}
