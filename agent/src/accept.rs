//! Accepts connections for the agent's own servers: a bounded number at once, until they are to end.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// Serves each connection on a task of its own, `most` at once, until `stop` changes or its sender goes away. What is under way then
/// ends by itself: `serve` looks at `stop` too. `full` is called where one has come for which there is no place yet.
pub(crate) async fn accept<F>(
    listener: TcpListener,
    most: usize,
    mut stop: watch::Receiver<bool>,
    full: impl Fn(),
    serve: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(most));
    loop {
        let next = async {
            let stream = listener.accept().await;
            if stream.is_ok() && places.available_permits() == 0 {
                full();
            }
            // One waits here, the others in the kernel's queue.
            let place = Arc::clone(&places).acquire_owned().await.ok()?;
            Some((stream, place))
        };
        let accepted = tokio::select! {
            _ = stop.changed() => return,
            accepted = next => accepted,
        };
        match accepted {
            Some((Ok((stream, _)), place)) => {
                let serving = serve(stream);
                tokio::spawn(async move {
                    serving.await;
                    drop(place);
                });
            }
            // No descriptors left, or the client has gone already: try again, but not in a loop that burns.
            Some((Err(_), _)) => tokio::time::sleep(Duration::from_millis(100)).await,
            None => return,
        }
    }
}
