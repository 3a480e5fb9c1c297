// The few socket calls of the tcp transport, with the options it wants. Nothing here waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/descriptor.h"

namespace pdlink::tcp {

// A numeric address ("127.0.0.1", "::1") and a port.
struct Address {
    std::string host;
    std::uint16_t port;
};

// A listening socket on a free port, which is written to `address.port`. Throws std::system_error,
// std::invalid_argument for a host that is not numeric.
Descriptor listen_on(Address& address);

// A connecting socket; writable once the attempt has ended. Throws as listen_on.
Descriptor begin_connect(const Address& address);

// The error of an ended connection attempt; 0 if it succeeded.
int connect_error(int fd);

// The next connection, -1 with errno if there is none.
int accept_one(int listener);

// No delay, and errors instead of silence: keep-alive and a limit for unanswered data.
void set_options(int fd);

// Choose the congestion control of a connection: the wanted one, or for "" on one host the first of cubic and reno
// that may be used. The kernel's default is often bbr, which paces: over loopback it moves half of what cubic does.
void choose_congestion(int fd, const std::string& wanted);
std::string congestion_of(int fd);
// Whether a congestion control can be used here and by us.
bool congestion_usable(const std::string& name);

// End both directions; bytes that are not in our memory yet are discarded.
void shut(int fd);

}  // namespace pdlink::tcp
